"""`python -m training.checkpoint verify|list|show PATH`"""

import sys

from training.checkpoint.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
