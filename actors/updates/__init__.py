"""From training to inference: publishers, producers, consumers, and the double buffer that answers meanwhile (Viper).

From outside: `publisher.Publisher`, `producer.Producer`, `consumer.Consumer`, `serving.Serving`,
`callback.CheckpointCallback`, `weights`, `ray_serve`. Stands on `client`. Nothing is imported here: `edge` needs
`serving` without an engine.
"""
