"""What the benches of storage share: trainings in processes of their own, fio, figures of many rounds."""
