"""The one error that the demo's commands turn into a line and exit code 2."""


class DemoError(RuntimeError):
    """A demo model cannot be made: a file is missing, damaged or not what the manifest says."""
