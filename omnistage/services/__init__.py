"""Stages as processes of their own, and the pipeline that joins them."""
