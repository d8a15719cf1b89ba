"""What is in on_it/ runs in the processes that test_rooms.py starts, and nowhere else."""

from tests.fake_runtime import runtime

collect_ignore = [] if runtime.is_here() else ["on_it"]
