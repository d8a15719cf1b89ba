// The calls of CUDA about streams and events.
#include "runtime.h"

namespace fake {
namespace {

std::set<Event *> events;

Event *event_of(cudaEvent_t handle) {
  const auto found = events.find((Event *)handle);
  return found == events.end() ? nullptr : *found;
}

}  // namespace
}  // namespace fake

using namespace fake;

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  *handle = (cudaStream_t)make_stream(need_context("cudaStreamCreate"), flags, priority).get();
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t *handle) {
  return cudaStreamCreateWithPriority(handle, cudaStreamDefault, 0);
}
API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  if (!stream_of(handle)) return fail(cudaErrorInvalidResourceHandle);
  destroy_stream(handle);  // its work still runs
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
  const Lock lock;
  const auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  *priority = stream->priority;
  return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  const auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = refuse_in_capture(stream, "cudaStreamQuery")) return fail(error);
  glance(tail(stream));
  return tail(stream).reached() ? cudaSuccess : fail(cudaErrorNotReady);
}

API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  const auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  need_context("cudaStreamSynchronize");
  if (const cudaError_t error = refuse_in_capture(stream, "cudaStreamSynchronize")) return fail(error);
  count_host_wait("cudaStreamSynchronize");
  run_until(tail(stream));
  return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  const auto stream = stream_of(handle);
  Event *const event = event_of(event_handle);
  if (!stream || !event) return fail(cudaErrorInvalidResourceHandle);
  if (event->capture) {
    if (event->capture->invalid) return fail(cudaErrorStreamCaptureInvalidated);
    if (stream->capture && stream->capture != event->capture) return fail(cudaErrorStreamCaptureMerge);
    stream->capture = event->capture;
    event->capture->ends[stream.get()].insert(event->captured.begin(), event->captured.end());
    return cudaSuccess;
  }
  if (!event->last) return cudaSuccess;
  if (stream->capture) {
    stream->capture->invalid = true;
    return fail(cudaErrorStreamCaptureIsolation);
  }
  if (event->last->point.reached()) return cudaSuccess;
  Work work;
  work.name = "wait";
  work.milliseconds = 0;
  work.after.push_back(event->last);
  return push(stream, std::move(work));
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  auto *const event = new Event{need_context("cudaEventCreate"), flags, nullptr, nullptr, {}};
  events.insert(event);
  *handle = (cudaEvent_t)event;
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t *handle) { return cudaEventCreateWithFlags(handle, cudaEventDefault); }

API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  if (!events.erase((Event *)handle)) return fail(cudaErrorInvalidResourceHandle);
  delete (Event *)handle;
  return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  Event *const event = event_of(handle);
  const auto stream = stream_of(stream_handle);
  if (!event || !stream || event->device != stream->device) return fail(cudaErrorInvalidResourceHandle);
  if (stream->capture) {
    event->capture = stream->capture;
    event->captured = stream->capture->ends[stream.get()];
    event->last.reset();
    return cudaSuccess;
  }
  event->capture.reset();
  event->last = std::make_shared<Record>();
  event->last->timed = !(event->flags & cudaEventDisableTiming);
  Work work;
  work.name = "event";
  work.milliseconds = 0;
  work.records = event->last;
  return push(stream, std::move(work));
}
API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  return cudaEventRecordWithFlags(handle, stream, cudaEventRecordDefault);
}

API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  Event *const event = event_of(handle);
  if (!event) return fail(cudaErrorInvalidResourceHandle);
  if (event->capture && !event->capture->invalid) return fail(cudaErrorCapturedEvent);
  if (!event->last) return cudaSuccess;
  if (const cudaError_t error = refuse_in_capture("cudaEventQuery")) return fail(error);
  glance(event->last->point);
  return event->last->point.reached() ? cudaSuccess : fail(cudaErrorNotReady);
}

API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  Event *const event = event_of(handle);
  if (!event) return fail(cudaErrorInvalidResourceHandle);
  if (event->capture && !event->capture->invalid) return fail(cudaErrorCapturedEvent);
  if (!event->last) return cudaSuccess;
  need_context("cudaEventSynchronize");
  if (const cudaError_t error = refuse_in_capture("cudaEventSynchronize")) return fail(error);
  count_host_wait("cudaEventSynchronize");
  run_until(event->last->point);
  return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin_handle, cudaEvent_t end_handle) {
  if (is_forked()) return fail(cudaErrorInitializationError);
  const Lock lock;
  Event *const begin = event_of(begin_handle), *const end = event_of(end_handle);
  if (!begin || !end || begin->device != end->device) return fail(cudaErrorInvalidResourceHandle);
  if (!begin->last || !end->last || !begin->last->timed || !end->last->timed) return fail(cudaErrorInvalidResourceHandle);
  if (!begin->last->point.reached() || !end->last->point.reached()) return fail(cudaErrorNotReady);
  *milliseconds = (float)(end->last->milliseconds - begin->last->milliseconds);
  return cudaSuccess;
}
