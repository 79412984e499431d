"""Errors that the user can fix. The command line prints them without a traceback and exits with code 2.

A message says what is wrong, where (file:line, parameter, tensor), and what to do about it.
Every other exception is a defect of ERNIEKit and keeps its traceback.
"""

from erniekit.terminal import escape_control_characters


class UserError(Exception):
    """Base of every error that the user can fix. Its text may quote files of others, so it is safe for a terminal."""

    def __str__(self) -> str:
        return escape_control_characters(super().__str__())


class ConfigurationError(UserError):
    """A parameter, or a combination of parameters, cannot be used."""


class DataError(UserError):
    """A data file is missing, unreadable or contains malformed records."""


class ModelFileError(UserError):
    """A model folder lacks a file, or one of its files does not fit the model."""


class CheckpointError(UserError):
    """A checkpoint is incomplete, damaged or does not fit the run that wants to resume from it."""


class TrainingError(UserError):
    """Training cannot continue, for example because the loss is not finite."""
