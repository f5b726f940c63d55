"""The two borders of an AR stage: input adapters on the way in, chunk processors on the way out."""
