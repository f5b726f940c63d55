"""Kills, stops and freezes each process of stages that are services; measures what it does."""
