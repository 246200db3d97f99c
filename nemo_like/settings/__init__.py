"""Settings files of other frameworks, read into values of our flags, and written."""

from nemo_like.settings.files import Settings, read_settings, write_settings

__all__ = ["Settings", "read_settings", "write_settings"]
