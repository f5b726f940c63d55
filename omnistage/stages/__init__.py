"""The coroutines of a pipeline: the AR stage, the decoder stage, and what a stage is."""
