"""SoCFlow+ (the article that extends SoCFlow by cooling): its tables and figures from our cost model and trainings."""
