"""The messages between agent, daemon, command line and dashboard: one pydantic model for each message.

There is a module for each subject. Times are seconds since the epoch, durations are seconds, sizes are bytes.
"""
