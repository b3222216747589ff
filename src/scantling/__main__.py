"""`python -m scantling` is the `scantling` command."""

from scantling.cli import main

if __name__ == "__main__":
    main()
