"""What all tests share: this checkout before any installed copy, and repeatable hypothesis runs.

No framework is imported here: parallel tests load this file in every rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
pytest.register_assert_rewrite("tests.contract.laws")

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")
