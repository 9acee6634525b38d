"""What passes between the rooms, as records without torch: settings, profiles, policies, a step's memory."""
