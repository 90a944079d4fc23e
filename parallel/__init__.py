"""Where it is computed: layouts, schedules, the ring, and everything that sends bytes between ranks."""
