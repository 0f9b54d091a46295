"""`python -m ddpcomm`: the command line."""

from ddpcomm.cli import main

if __name__ == "__main__":
    main()
