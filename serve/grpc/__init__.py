"""The gRPC service (pallasite.v1), its client, and the commands `serve` and `chat`. docs/grpc.md is for their users.

mailbox: from the engine's thread to the event loop. messages: protobuf to our types and back. errors: what a caller is
told. service: the RPCs. server: ports, health, draining. client, chat: the other end. cli: the commands' options.
"""
