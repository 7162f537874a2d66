"""The book's table of contents, executable: ``python -m chapters``."""
