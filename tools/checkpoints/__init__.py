"""Small models with random weights, written as the published ones are: same files, keys and names.

They make noise. What they prove is that a published model of the same format loads and runs.
"""
