"""The daemon: servicers over the core, and its life cycle."""
