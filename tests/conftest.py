"""What all tests share: one thread, a quiet TensorFlow, and hypothesis runs that repeat.

No framework is imported here: parallel tests load this file in every rank.
"""

from __future__ import annotations

import os

import hypothesis
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.register_assert_rewrite("tests.contract.laws")

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")
