"""Small checkpoints in the formats that public ones have: real layouts, seeded weights."""
