"""Common parts of the storage benches: trainings in their own processes, fio, and statistics over rounds."""
