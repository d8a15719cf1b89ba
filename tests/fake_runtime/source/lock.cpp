// The lock that every call holds, and Python's beside it.
#include <dlfcn.h>
#include <unistd.h>

#include "runtime.h"

namespace fake {
namespace {

std::recursive_mutex mutex;
pid_t owner = 0;
std::vector<std::string> hazards;

template <class Function>
Function *python(const char *name) {
  return (Function *)dlsym(RTLD_DEFAULT, name);
}

bool python_runs() {
  static auto *const is_initialized = python<int()>("Py_IsInitialized");
  return is_initialized && is_initialized();
}

}  // namespace

Lock::Lock() {
  if (!owner) owner = getpid();
  if (mutex.try_lock()) return;
  static auto *const holds = python<int()>("PyGILState_Check");
  static auto *const save = python<void *()>("PyEval_SaveThread");
  static auto *const restore = python<void(void *)>("PyEval_RestoreThread");
  void *const state = python_runs() && holds() ? save() : nullptr;
  mutex.lock();
  // Whoever has Python's lock now gives it up before it waits for this one.
  if (state) restore(state);
}

Lock::~Lock() { mutex.unlock(); }

WithPython::WithPython() {
  if (!python_runs()) return;
  static auto *const ensure = python<int()>("PyGILState_Ensure");
  static auto *const disable = python<int()>("PyGC_Disable");
  there_ = true;
  state_ = ensure();
  collected_ = disable();
}

WithPython::~WithPython() {
  if (!there_) return;
  static auto *const release = python<void(int)>("PyGILState_Release");
  static auto *const enable = python<int()>("PyGC_Enable");
  if (collected_) enable();
  release(state_);
}

bool is_forked() { return owner && owner != getpid(); }

void report(const std::string &hazard) { hazards.push_back(hazard); }

}  // namespace fake

// What was reported since the last call, a line each; valid until the next.
API const char *fake_hazards() {
  const fake::Lock lock;
  static std::string text;
  text.clear();
  for (const std::string &hazard : fake::hazards) text += hazard + "\n";
  fake::hazards.clear();
  return text.c_str();
}
