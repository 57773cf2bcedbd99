def write_report(*a):
    return 0
