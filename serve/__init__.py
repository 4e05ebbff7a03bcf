"""Who is served when: requests, pages, scheduler, step programs, engine, notebook pipeline, gRPC service."""
