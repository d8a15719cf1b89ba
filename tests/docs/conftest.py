from helpers.command_line import command

__all__ = ["command"]
