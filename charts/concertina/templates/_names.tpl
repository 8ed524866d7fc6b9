{{- define "concertina.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "concertina.selector" -}}
app.kubernetes.io/name: concertina-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "concertina.labels" -}}
{{ include "concertina.selector" . }}
app.kubernetes.io/part-of: concertina
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* Each release has its own: operators that have one in common take turns, whatever namespaces they serve. */ -}}
{{- define "concertina.lease" -}}
{{ include "concertina.name" . }}-operator
{{- end -}}

{{- define "concertina.masterKeySecret" -}}
{{ .Values.masterKey.existingSecret | default (printf "%s-master-key" (include "concertina.name" .)) }}
{{- end -}}

{{- /* What the operator may do where TrainingJobs are: each verb is one that it uses. */ -}}
{{- define "concertina.jobRules" -}}
- apiGroups: [concertina.dev]
  resources: [trainingjobs]
  verbs: [get, list, watch, delete] # delete: ttlSecondsAfterFinished
- apiGroups: [concertina.dev]
  resources: [trainingjobs/status]
  verbs: [patch]
- apiGroups: [concertina.dev]
  resources: [trainingjobs/finalizers] # asked for by OwnerReferencesPermissionEnforcement: pods block their job's deletion
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete] # patch: those of a failed job are ended in place, for their logs
- apiGroups: [""]
  resources: [secrets] # a job's identity is written, and never read
  verbs: [create]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end -}}
