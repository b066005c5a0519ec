"""``python -m hicache_shared.cli``."""

import sys

from hicache_shared.cli import main

sys.exit(main())
