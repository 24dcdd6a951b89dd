"""What measured times say: why more chips do not help, which setting made a step slower, how fast a machine is."""
