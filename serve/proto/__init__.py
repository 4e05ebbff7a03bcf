"""The gRPC interface: pallasite.proto, and the Python code that protoc makes of it (docs/grpc.md says how)."""
