"""The operator inside other libraries. Each module imports what it serves, so import the one that you use."""
