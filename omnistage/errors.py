"""Every error omnistage raises, in one tree.

The branch says whose move it is, the attributes say where it happened, the message says what to
do::

    OmniStageError
    ├── ClientError                 the caller can fix it (HTTP 4xx)
    │   ├── InvalidRequest          text, ids, sampling or options that cannot be served
    │   ├── ConfigError             a pipeline, stage or decoder that cannot be built as described
    │   ├── StreamClosed            a stream used after it was closed or aborted
    │   └── ReaderStalled           a stream that is not read
    └── ServerError                 the pipeline could not do it (HTTP 5xx)
        ├── UnsupportedEnvironment  platform, event loop or package version out of range
        ├── StartupError            a stage did not come up
        ├── StageClosed             a stage that is stopping, stopped or dead
        │   └── EngineDead          vLLM's engine process is gone
        ├── DeadlineExceeded        a stage was late
        ├── ProcessorError          a chunk processor raised
        ├── DecoderError            a decoder raised or broke its contract
        ├── ProtocolError           a frame that is no valid omnistage message
        ├── UpdatesLost             a gap in a channel's sequence, or ids that never arrived
        └── SubscriberStalled       a subscriber that does not read
"""

from __future__ import annotations


class OmniStageError(Exception):
    """Root of all errors raised by omnistage.

    Args:
        message: What happened and what to do about it.
        request_id: The internal id of the request concerned, if one is.
        stage: The name of the stage where it happened, if one did.
    """

    def __init__(
        self, message: str, *, request_id: str | None = None, stage: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.stage = stage

    def __str__(self) -> str:
        where = [f"stage {self.stage!r}"] if self.stage else []
        where += [f"request {self.request_id}"] if self.request_id else []
        return f"{self.message} ({', '.join(where)})" if where else self.message


class ClientError(OmniStageError):
    """The caller asked for something that cannot be done; asking again unchanged fails again."""


class InvalidRequest(ClientError):
    """A request refused at admission: nothing was sent, nothing has to be cleaned up.

    Args:
        message: What happened and what to do about it.
        parameter: The name of the offending argument, if there is one.
        request_id: The internal id of the request concerned, if one is.
        stage: The name of the stage where it happened, if one did.
    """

    def __init__(
        self,
        message: str,
        *,
        parameter: str | None = None,
        request_id: str | None = None,
        stage: str | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id, stage=stage)
        self.parameter = parameter


class ConfigError(ClientError):
    """A pipeline, stage, processor or decoder configuration that cannot work."""


class StreamClosed(ClientError):
    """The stream was closed or aborted before this call."""


class ReaderStalled(ClientError):
    """The stream was not read and its unread audio reached the bound."""


class ServerError(OmniStageError):
    """The pipeline failed a request that was in order."""


class UnsupportedEnvironment(ServerError):
    """The platform, the event loop or an installed package is outside what omnistage supports."""


class StartupError(ServerError):
    """A stage did not come up."""


class StageClosed(ServerError):
    """The stage is draining, stopped or dead and takes no requests."""


class EngineDead(StageClosed):
    """vLLM's engine process died; every request it held has failed."""


class DeadlineExceeded(ServerError):
    """A stage did not answer in time; the message names which and how long it had."""


class ProcessorError(ServerError):
    """A chunk processor raised or returned something that is not an update."""


class PayloadError(ServerError):
    """vLLM's worker could not give a request's tensors; the message is the original exception's."""


class DecoderError(ServerError):
    """A decoder raised, or returned audio that contradicts its declaration."""


class ProtocolError(ServerError):
    """A frame that is not a valid message of this protocol version."""


class UpdatesLost(ServerError):
    """Updates of this request were lost on their way to the subscriber."""


class SubscriberStalled(ServerError):
    """The request's subscriber does not read and its updates no longer fit in the bound."""


def error_of_kind(kind: str | None, message: str) -> OmniStageError:
    """The error that another process reported, as its own class; unknown ones as ServerError."""
    found = globals().get(kind or "")
    if isinstance(found, type) and issubclass(found, OmniStageError):
        return found(message)
    return ServerError(message)
