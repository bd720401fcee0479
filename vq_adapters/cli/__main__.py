"""`python -m vq_adapters.cli`."""

import sys

from vq_adapters.cli import main

sys.exit(main())
