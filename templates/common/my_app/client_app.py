"""The client: model, data and trainer make a ClientApp."""

from my_app.task import make_model, make_trainer, training_data
from socflower import make_client_app

app = make_client_app(make_model, training_data, make_trainer)
