"""The worker side: carries out the scheduler's plans on one rank."""
