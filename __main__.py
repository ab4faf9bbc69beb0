"""`python -m foretoken` is the console script."""

from .server.cli import main

if __name__ == "__main__":
    main()
