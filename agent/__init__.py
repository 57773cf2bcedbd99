"""The agent, which runs in the training process: optimizer, offload engine, storage paths, telemetry and control."""
