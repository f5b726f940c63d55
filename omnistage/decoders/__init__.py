"""Decoders and the window wrapper that streams them; none of them knows a request or a transport.

Nothing is imported eagerly: a decoder module needs torch, this package does not.
"""
