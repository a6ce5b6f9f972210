"""gRPC, HTTP, command line and client: the only place with protobuf, ASGI and signals."""
