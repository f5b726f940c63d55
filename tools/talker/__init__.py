"""Trains the talker from nothing but a package index, stage by stage: `python -m tools.talker`."""
