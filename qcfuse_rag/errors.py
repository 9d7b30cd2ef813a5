"""The errors a user can meet. Each message says what is wrong and what to do about it."""

from __future__ import annotations


class QCFuseError(Exception):
    """Base of every error this library raises on purpose; the CLI prints it as one line."""


class ModelNotFound(QCFuseError):
    """The model name is neither a folder, nor a GGUF file, nor an id that can be fetched."""


class UnsupportedModel(QCFuseError):
    """Reusing this model's keys and values would not be right; the message names the reason."""


class PromptTooLong(QCFuseError):
    """The prompt and the tokens to generate do not fit the model's context window."""


class Busy(QCFuseError):
    """A queue has no room for another request; ask again later."""


class Closed(QCFuseError):
    """The engine was closed before an answer was whole."""


class InvalidTemplate(QCFuseError):
    """A prompt template from which the fixed head, the passages and the question cannot be told apart."""


class InvalidGrammar(QCFuseError):
    """A grammar or JSON schema that no answer can be made to follow."""


class UnknownMethod(QCFuseError):
    """No method of that name, or it does not take that parameter."""


class MisplacedSetting(QCFuseError):
    """A setting where it has no effect; the message says where it belongs."""


class ProfileError(QCFuseError):
    """A profile of critical layers that cannot be made, read or written, or that is of another model."""


class Unverified(QCFuseError):
    """A passing verdict was required and there is none; see `qcfuse verify`."""


class UnverifiedMethod(UserWarning):
    """A method is used without a passing verdict on the model; see `qcfuse verify`."""


class UnusedSetting(UserWarning):
    """A setting that nothing here reads: misspelt, or of another model's."""


class NotStored(UserWarning):
    """Passages that were not stored, with the reason; questions over them are answered all the same."""


class StoreError(QCFuseError):
    """The store cannot be opened or written; reading never raises it, a bad entry is a miss."""


class CorruptEntry(QCFuseError):
    """Stored bytes fail their checks. Caught by the engine: the chunk is recomputed."""


class ForeignEntry(CorruptEntry):
    """Stored bytes that are sound for somebody else, who has the secret or has none. A miss; left where they are."""
