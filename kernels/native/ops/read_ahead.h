// So many bytes, the last of them maybe of what lies behind; null if there are none left.
inline const char* take(ReadAhead& ahead, int bytes) {
  if (ahead.at >= ahead.end && ahead.then) ahead = {ahead.then, ahead.then_end, nullptr, nullptr};
  if (ahead.at >= ahead.end) return nullptr;
  const char* const taken = ahead.at;
  ahead.at = taken + bytes < ahead.end ? taken + bytes : ahead.end;
  return taken;
}
