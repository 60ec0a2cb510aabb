"""How old the data of an update is: schedule, refresh interval, replay queue."""
