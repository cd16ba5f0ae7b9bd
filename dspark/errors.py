"""The one error a user is meant to read."""


class UsageError(SystemExit):
    """Stops the process with one sentence on stderr and exit status 1.

    It derives from SystemExit because SGLang logs and swallows every `Exception` a plugin raises.
    """

    def __init__(self, sentence: str):
        super().__init__(f"dspark: {sentence}")
