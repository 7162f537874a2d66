"""The measuring stick and one model; every file can be copied alone."""
