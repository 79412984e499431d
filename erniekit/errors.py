"""The errors a user can mend. The command line prints them without a traceback and exits with code 2.

A message says what is wrong, where (file:line, parameter, tensor), and what to do about it.
Anything else that is raised is a defect of ERNIEKit and keeps its traceback.
"""


class UserError(Exception):
    """Base of every error that the user can mend."""


class ConfigurationError(UserError):
    """A parameter, or a combination of parameters, cannot be used."""


class DataError(UserError):
    """A data file is missing, unreadable or holds malformed records."""


class ModelFileError(UserError):
    """A model folder lacks a file, or one of its files does not fit the model."""


class CheckpointError(UserError):
    """A checkpoint is incomplete, damaged or does not fit the run that wants to resume from it."""


class TrainingError(UserError):
    """Training cannot go on, for example because the loss is not finite."""
