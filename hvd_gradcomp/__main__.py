"""``python -m hvd_gradcomp``."""

import sys

from hvd_gradcomp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
