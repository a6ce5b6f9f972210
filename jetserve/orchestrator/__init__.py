"""The engine thread and its async face: submit, stream, abort, drain, health."""
