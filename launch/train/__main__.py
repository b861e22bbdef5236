"""`accelerate launch -m draftsmith.launch.train RECIPE`: the verb `train` in every process."""

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
