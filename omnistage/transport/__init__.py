"""ZeroMQ, and the only package that imports it: the publisher, the subscriber, the control socket.

It moves messages of :mod:`omnistage.wire` and knows neither vLLM nor what the messages are for.
"""
