"""Protobuf: definitions compiled in a child process, private descriptors, and compatibility on the wire."""
