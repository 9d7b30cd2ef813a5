"""Errors and warnings for users. Each message says what is wrong and how to fix it."""

from __future__ import annotations


class QCFuseError(Exception):
    """Base class of all errors that this library raises on purpose; the CLI prints them as one line."""


class ModelNotFound(QCFuseError):
    """The model name is no folder, no GGUF file and no id that can be fetched."""


class UnsupportedModel(QCFuseError):
    """Reusing this model's keys and values would give wrong results; the message names the reason."""


class PromptTooLong(QCFuseError, ValueError):
    """The prompt exceeds the model's context window. LlamaIndex raises a `ValueError` for that, so this is one, too."""


class InvalidSetting(QCFuseError):
    """A setting of one request cannot be used. `param` is its name, `code` the kind of fault in OpenAI's words."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param, self.code = param, code


class Busy(QCFuseError):
    """A queue is full, or another job holds a lock; try again later."""


class Closed(QCFuseError):
    """The engine is closed, or was closed before an answer was complete."""


class InvalidTemplate(QCFuseError):
    """The system prefix, the passages and the question cannot be separated in this prompt template."""


class InvalidGrammar(QCFuseError):
    """No answer can follow this grammar or JSON schema."""


class UnknownMethod(QCFuseError):
    """There is no method of this name, or the method has no such parameter."""


class MisplacedSetting(QCFuseError):
    """A setting was given where it has no effect; the message says where it belongs."""


class Unverified(QCFuseError):
    """A passing verdict is required but missing; see `qcfuse verify`."""


class UnverifiedMethod(UserWarning):
    """A method is used without a passing verdict for the model; see `qcfuse verify`."""


class UnusedSetting(UserWarning):
    """Nothing reads this setting: it is misspelt, or belongs to another class."""


class NotStored(UserWarning):
    """Some passages were not stored, for the reason given; questions over them are still answered."""


class StoreError(QCFuseError):
    """The store cannot be opened or written. Reading never raises this error: a bad entry is a miss."""


class CorruptEntry(QCFuseError):
    """Stored bytes fail their checks. The engine catches this error and recomputes the chunk."""


class ForeignEntry(CorruptEntry):
    """An entry is encrypted with another secret, or only one side uses encryption. It is a miss and stays stored."""
