"""The daemon's cache inside other people's libraries. Each one is imported by its package only."""
